"""Every plan on families of `transformers` that nobody chose: drawn by a seed, small, checked and trained."""
