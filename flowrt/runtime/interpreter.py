"""How a process of flowrt starts another one: ``python -Pm MODULE``, without the current directory on its path.

With ``-m`` a file of the user's in that directory would hide the module of Python that has its name, such as random.py.
A user's file may still import modules of that directory (`flowrt.rewards.user_file.make_siblings_importable`).
"""

RUN_MODULE = "-Pm"
