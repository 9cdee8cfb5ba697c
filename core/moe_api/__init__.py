"""The contract between users, operator and workers: names, documents, metrics. Pure; imports
nothing of ours."""
