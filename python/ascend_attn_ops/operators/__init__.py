"""The public functions of the operators, one module each; users find them in the package itself."""
