"""Write a model as ONNX files, check and quantise them, and run them without torch.

asked.py     what is asked of them, checked before torch is imported
graph.py     model's folder -> onnx/model.onnx, compared with PyTorch
quantise.py  model.onnx -> model_quantized.onnx (int8), gated by a measured quality
session.py   runs a file: texts -> vectors, tokens -> logits; imports no torch
heads.py     figures of LM heads, with files and other models beside each other
quality.py   what a file's answers are worth: masked accuracy, or correlation
write.py     all files of a folder, their record and their part of the card
speed.py     size, latency and memory of models and files, one beside the other
"""
