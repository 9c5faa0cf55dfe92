"""What each operator of the package computes, with samples: one `OpSpec` in a file of its own."""
