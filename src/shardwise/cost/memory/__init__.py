"""Predicted bytes: state, activations, and a step's program played to a model of the caching allocator."""
