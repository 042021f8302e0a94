"""Do what forked processes of tests would each do, once in the server that forks them."""

from contextlib import suppress

from data_prep.pipeline import code

for stage in code.BEHAVIOUR:
    code.code_of(stage)  # reads this project's source, half a second for each `prepare`
with suppress(ImportError):
    from transformers import AutoTokenizer as AutoTokenizer
with suppress(ImportError):  # the tests of the corpus run without torch, too
    from support import rank_work as rank_work
