"""The cluster on a simulated clock: real rules (`NodeCore`), a simulated network, engines that only ask and store."""
