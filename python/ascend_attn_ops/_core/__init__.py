"""The ground of the package: errors, loading, private parts of torch, lengths, pages, limits."""
