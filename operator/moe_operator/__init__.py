"""The control plane: reconciles an MoEDeployment into worker pods and walks their placement to a better one."""
