"""Programs: what users compute for one score of flex attention, as text and as machine code."""
