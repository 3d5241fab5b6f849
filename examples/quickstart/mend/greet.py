def greet(name):
    return "Hello, " + nme + "!"
