"""What a trained model can do: text that it continues, and multiple-choice tasks."""
