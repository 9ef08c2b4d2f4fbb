"""Receipts for loops of other tools: observe two optimizer steps, compare all ranks, detach."""
