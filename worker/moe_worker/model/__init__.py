"""The model as its checkpoint describes it: configuration, weights and the transformer itself."""
