"""The operators in other people's models and trainers; nothing here is imported by the package."""
