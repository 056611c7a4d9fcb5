"""What all of the package stands on: errors, loading, private parts of torch, lengths, pages."""
