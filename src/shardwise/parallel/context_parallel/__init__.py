"""Context parallel: attention over sequences that are sharded over ranks (DeepSpeed Ulysses)."""
