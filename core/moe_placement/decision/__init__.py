"""When to rebalance and how far: loads, triggers, walks under way, replays."""
