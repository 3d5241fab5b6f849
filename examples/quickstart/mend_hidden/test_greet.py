import unittest

from greet import greet


class Greeting(unittest.TestCase):
    def test_it_greets(self):
        self.assertEqual(greet("Ada"), "Hello, Ada!")

    def test_empty(self):
        self.assertEqual(greet(""), "Hello, !")


unittest.main()
