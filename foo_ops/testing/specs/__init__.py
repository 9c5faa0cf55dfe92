"""Tell what each operator of the package computes, with samples: one `OpSpec` a file."""
