"""SGLang behind `flowrt.engines.server`.

`tensor_pickles` is the only module that writes a pickle; no module reads one.
"""
