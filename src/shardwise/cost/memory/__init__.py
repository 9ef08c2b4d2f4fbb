"""Predicted bytes: state, activations, and a step replayed through an allocator model."""
