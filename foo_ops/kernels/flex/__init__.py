"""Programs: users' functions of one score of flex attention, as text and as machine code."""
