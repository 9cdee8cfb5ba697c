"""Plans from nothing whose copies serve shares of their own."""
