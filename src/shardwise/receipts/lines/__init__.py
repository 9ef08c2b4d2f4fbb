"""Lines of a receipt, one file for each kind."""
