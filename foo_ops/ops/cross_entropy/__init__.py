"""Cross-entropy, of logits or of a last layer's input, on one process or several."""
