"""The report of a run as one HTML file, and the record that it is made from."""
