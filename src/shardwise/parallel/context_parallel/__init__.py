"""Context parallel: attention over sequences sharded over ranks (DeepSpeed Ulysses)."""
