// What the engines and the client of the bench share: a clock, memory, sockets of this machine and
// one epoll set for all of them. Included first, and once by each program.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEX = 12 }; // digits of a conversation's or a request's number in a prompt

static int epoll_fd;

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void *grown(void *memory, size_t size) {
    void *more = realloc(memory, size);
    if (!more) {
        perror(program_invocation_short_name);
        exit(1);
    }
    return more;
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

// Adds a connection to the set; its events bring `conn`.
static void poll_in(int fd, void *conn) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = conn};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
}

// Polls a connection for room to write, too, or no more; `polls_out` is whether it does now.
static void poll_out(int fd, void *conn, int *polls_out, int on) {
    if (*polls_out == on) return;
    struct epoll_event e = {.events = EPOLLIN | (on ? EPOLLOUT : 0), .data.ptr = conn};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, fd, &e);
    *polls_out = on;
}
