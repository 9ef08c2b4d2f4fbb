"""The speed of links: measured, fitted, judged."""
