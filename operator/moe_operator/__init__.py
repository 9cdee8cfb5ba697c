"""The control plane: an MoEDeployment becomes worker pods, and their placement gets better."""
