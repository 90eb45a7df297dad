"""What a recipe will need, worked out without starting anything."""
