"""The images of `containers/images.yaml`: built, pulled, checked and kept."""
