"""The receipts: planned, taken effect and measured, side by side."""
