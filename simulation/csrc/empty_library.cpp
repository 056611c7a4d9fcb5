// torch_npu names more libraries than it needs functions from: all functions are in libascendcl.so.
