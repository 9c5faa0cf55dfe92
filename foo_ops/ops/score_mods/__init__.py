"""What users write for one score of attention, as programs: traced, kept and evaluated."""
