"""The plan of a recipe: its ranks, memory and refit, computed without starting anything."""
