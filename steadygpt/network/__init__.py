"""The Hugging Face Hub and object stores."""
