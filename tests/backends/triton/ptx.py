def loads_around_wait(ptx, names):
    return {}
