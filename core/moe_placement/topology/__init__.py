"""Plans that see domains: what crosses their borders, copies apart, experts together."""
