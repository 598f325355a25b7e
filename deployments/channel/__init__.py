"""The channel on which Front and a decode worker talk: one connection, all requests of the two.

address.py  where a worker's end listens
frames.py   what is said, and its bytes
stream.py   frames over a connection, once both ends have proved that they know the secret
server.py   the decode worker's end
client.py   Front's end of the channel to one worker
pool.py     all of them, as the `WorkerPool` of Front's backend; choice.py chooses among them
"""
