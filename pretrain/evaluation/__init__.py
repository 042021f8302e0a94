"""Measure finished models: runs, folders of transformers and ONNX files.

heads.py       LM heads on masked tokens
tasks.py       heads of tasks on examples
encoders.py    vectors of texts, on documents or pairs with scores
suite.py       runs on several tasks and seeds
validation.py  a run's own figures on validation rows
"""
