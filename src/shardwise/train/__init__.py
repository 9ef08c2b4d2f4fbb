"""The session, the loop and the data."""
