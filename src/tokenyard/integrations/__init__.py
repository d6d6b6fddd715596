"""tokenyard inside other libraries."""
