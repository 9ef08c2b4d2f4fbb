"""Time and stall of saving, against DCP and `torch.save`."""
