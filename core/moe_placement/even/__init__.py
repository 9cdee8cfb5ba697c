"""Plans for engines that split tokens evenly among copies."""
