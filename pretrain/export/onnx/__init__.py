"""Write a model as ONNX files, and compare them with PyTorch."""
