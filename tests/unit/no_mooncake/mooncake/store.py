raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")
