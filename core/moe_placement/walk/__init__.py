"""From one placement to another, safe at every instant; ranks that come and go."""
