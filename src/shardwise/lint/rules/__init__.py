"""The rules, a file for each theme; a module that is put here is found by itself."""
