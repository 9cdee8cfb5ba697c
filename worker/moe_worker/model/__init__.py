"""The model as its checkpoint describes it: configuration, weights, attention and the transformer itself."""
