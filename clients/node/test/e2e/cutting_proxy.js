/** A TCP proxy whose connections a test can cut, as a dying server or network does. */

import { connect, createServer } from 'node:net';

/** Forward a free port of loopback to HOST:PORT. */
export async function startProxy(target) {
  const [host, port] = target.split(':');
  const sockets = new Set();
  const server = createServer((near) => {
    const far = connect(Number(port), host);
    near.pipe(far).pipe(near);
    for (const socket of [near, far]) {
      sockets.add(socket);
      socket.on('error', () => {}); // the other end's cut
      socket.on('close', () => {
        sockets.delete(socket);
        near.destroy();
        far.destroy();
      });
    }
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  const cut = () => sockets.forEach((socket) => socket.resetAndDestroy());
  return {
    target: `127.0.0.1:${server.address().port}`,
    cut,
    stop: () => {
      server.close();
      cut();
    },
  };
}
