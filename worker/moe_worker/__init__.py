"""The data plane: an expert-parallel runtime that serves the OpenAI API and moves experts while
serving."""
