"""One module per operator."""
